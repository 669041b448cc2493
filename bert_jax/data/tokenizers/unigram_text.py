"""What ALBERT and XLNet do to a text before its pieces are looked for.

White space becomes single spaces, `` and '' become ", characters are decomposed (NFKD)
and lose their accents, letters are lower-cased: each of the last two is a switch.
"""

import re
import unicodedata

Spans = list[tuple[int, int]]
QUOTES = ("``", "''")


def change_text(text: str, *, lowercase: bool, strip_accents: bool) -> str:
    text = " ".join(text.split())
    for quotes in QUOTES:
        text = text.replace(quotes, '"')
    if strip_accents and not text.isascii():
        text = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in text if not unicodedata.combining(char))
    return text.lower() if lowercase else text


def align_text(text: str, *, lowercase: bool, strip_accents: bool) -> tuple[str, Spans]:
    """As `change_text`, with the place in `text` where each character came from.

    Here by character, which gives the same: NFKD orders nothing but the accents that
    are dropped, and only Σ is lower-cased by its surroundings, to one character.
    """
    changed = change_text(text, lowercase=lowercase, strip_accents=strip_accents)
    if text.isascii() and len(changed) == len(text):
        return changed, [(i, i + 1) for i in range(len(text))]
    chars, spans = [], []
    for match in re.finditer(r"``|''|\s+|\S", text):
        found, span = match.group(), match.span()
        if found.isspace():
            found = "" if span[0] == 0 or span[1] == len(text) else " "
        elif found in QUOTES:
            found = '"'
        elif strip_accents:
            found = unicodedata.normalize("NFKD", found)
            found = "".join(char for char in found if not unicodedata.combining(char))
        for char in found:
            width = len(char.lower()) if lowercase else 1
            chars.append(char)
            spans += [span] * width
    changed = "".join(chars)
    return (changed.lower() if lowercase else changed), spans
