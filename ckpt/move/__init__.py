"""The only code that moves tensor bytes: opens files, reads ranges, casts, writes, stages and commits.

Imports `plan` and `errors`.  It knows no format.
"""
