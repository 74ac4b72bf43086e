"""What of an artifact root nothing needs any more, and how it goes (`sandhi gc`)."""
