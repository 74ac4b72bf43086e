"""Pictures and tables as the UI's metadata: bounded, whatever a pool holds, and said in words."""

import base64
import re

import pytest

from assets import pictures as shown
from assets.pictures import picture
from assets.tables import MOST_ROWS, table
from sandhi_core.report import pictures
from sandhi_core.report.page import Table, row
from tests.synthetic import holdout


def test_a_picture_is_a_png_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    held = holdout("a", [1, 3])
    drawn = pictures.holdout({"a": held})
    found = re.fullmatch(r"!\[([^\]]+)\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", picture(drawn).md_str)
    assert found is not None and found[1] == drawn.alt
    assert base64.b64decode(found[2]).startswith(b"\x89PNG")
    monkeypatch.setattr(shown, "LARGEST_PICTURE", 1000)
    assert picture(drawn).md_str == f"{drawn.alt} (The picture is too large to be kept here; the report has it.)"


def test_a_task_named_like_markup_stays_within_the_words() -> None:
    held = holdout("a", [1])
    (task,) = held.tasks.values()
    named = held.model_copy(update={"tasks": {"](javascript:x)\n<b>": task}})
    text = picture(pictures.holdout({"a": named})).md_str
    words, _, rest = text.partition("](data:image/png;base64,")
    assert words.startswith("![") and not re.search(r"[\[\]<>\n]", words[2:]) and rest.endswith(")")


def test_of_very_many_models_some_are_told() -> None:
    held = {f"m{n}": holdout(f"m{n}", [1]) for n in range(30)}
    assert pictures.holdout(held).alt.endswith("; and 18 more.")


def test_a_table_has_the_rows_as_text_and_says_what_it_leaves_out() -> None:
    many = Table("caption", ("step", "score"), tuple(row(str(n), "x") for n in range(MOST_ROWS + 7)))
    records = [record.data for record in table(many).records]
    assert records[0] == {"step": "0", "score": "x"} and len(records) == MOST_ROWS + 1
    assert records[-1] == {"step": "and 7 more", "score": ""}
    assert [r.data for r in table(Table("caption", ("step", "score"), (), "no step")).records] == [
        {"step": "no step", "score": ""}
    ]
