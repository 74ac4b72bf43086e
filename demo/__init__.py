"""A small pool to try Sandhi on, made from nothing: tasks by rule, a base trained on them, specialists, an outsider."""
