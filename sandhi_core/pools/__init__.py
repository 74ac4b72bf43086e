"""The pool file: read as strict YAML, validated, its mistakes told in words for whoever wrote it."""
