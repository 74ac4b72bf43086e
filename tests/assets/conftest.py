"""The finished pool of records that the report's tests draw."""

from tests.report.conftest import data as data
