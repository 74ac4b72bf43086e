"""`sandhi verify`: an export held to what it says of itself, and where it is asked real servers of it.

Above serving and evaluation, which know nothing of it.
"""
