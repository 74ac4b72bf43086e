"""Scoring: tasks and requests through lm-eval, one resident model, every score kept by what it was made from."""
