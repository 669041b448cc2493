"""Tests of every kind of tokenizer; WordPiece alone is in test_tokenizers.py.

Not called `tokenizers`: with tests/data on the path that would hide the library.
"""
