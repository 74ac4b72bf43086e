"""What a server needs to know: a specification for the pool, and its renderings for serving engines."""
