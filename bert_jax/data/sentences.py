"""Sentences of English and Chinese text, by rule.

One expression finds every place where a sentence may end, and a few looked-up words
(titles, abbreviations, initials) say where it does not. A line break always ends a
sentence, so the input holds one paragraph (or one sentence) a line. Only white space
at the borders is lost: the sentences joined are the text again.
"""

import re

_OPENERS = r"""["'“‘(\[{«]*"""
# Marks (". . ." is one), closing quotes or brackets, white space. The single class in
# front is what lets `re` skip quickly to the next mark.
_ENDS = re.compile(
    r"""([.!?…。！？；．](?:\s?[.!?…。！？；．])*)(["'”’)\]}»」』）】》〉]*)(\s*)"""
)
_WIDE = frozenset("。！？；")
# What may follow ! ? … without a space for a border: Chinese, or its opening marks.
_CHINESE = re.compile(r"[“‘「『（《【\u3400-\u9fff]")
_LOWER = re.compile(r"[^\w\s]*[a-zß-öø-ÿ]")

# Never the last word of a sentence.
_TITLES = re.compile(
    r"mr|mrs|ms|dr|prof|st|gen|col|capt|lt|sgt|maj|rev|hon|messrs|mme|mlle|gov|sen|pres"
    r"|supt|mt|e\.g|i\.e|cf|viz|vs|approx|incl|ca",
    re.IGNORECASE,
)
# An abbreviation only before a number: "No. 5", but "No. He left."
_COUNTED = re.compile(
    r"nos?|figs?|eqs?|sec|ch|chap|vols?|pp?|art|jan|feb|mar|apr|jun|jul|aug|sept?|oct"
    r"|nov|dec",
    re.IGNORECASE,
)
# May be the last word, as may acronyms (U.S.) and single capitals (plan B.).
_FINAL = re.compile(r"co|inc|ltd|corp|jr|sr|bros|al|dept|ave|esq", re.IGNORECASE)
_ACRONYM = re.compile(r"[A-Z]|(?:[A-Za-z]{1,2}\.)+[A-Za-z]{1,2}")
# After those a new sentence is believed only if one of these words starts it.
_STARTER = re.compile(
    rf"{_OPENERS}(?:The|This|That|These|Those|There|Then|They|We|You|He|She|It|I|A|An|"
    r"In|On|At|As|If|When|While|Where|What|Who|Why|How|But|And|Or|So|For|From|To|By|"
    r"With|Its|His|Her|Their|Our|My|No|Not|Yes|After|Before|Although|However|Since|"
    r"Such|Some|All|Both|Each|Many|Most|One|Once)\b(?!\.)"
)
_NUMBER = re.compile(r"[\dIVXLC]")
# The number of a list item belongs to the item: "1. Open the box."
_ITEM = re.compile(r"\W*(?:\d{1,3}|[a-z]|[IVXLC]+)")
# "Come!" Tom said.
_SPEECH = re.compile(
    r"(?:[A-Z]\S*\s){1,3}(?:said|asked|cried|replied|answered|exclaimed|inquired|"
    r"shouted|whispered|repeated|returned|thought)\b"
)


def split(text: str) -> list[str]:
    """The sentences of `text`, in order, without the white space around them."""
    found = []
    for line in text.splitlines():
        start = 0
        for end in _ENDS.finditer(line):
            if end.end() < len(line) and _is_border(line, start, end):
                found.append(line[start : end.end()].strip())
                start = end.end()
        if rest := line[start:].strip():
            found.append(rest)
    return found


def _is_border(line: str, start: int, end: re.Match) -> bool:
    """Whether the sentence which began at `start` ends with the marks of `end`."""
    marks, closers, space = end.groups()
    after = end.end()
    if not _WIDE.isdisjoint(marks):
        # “好！”，他说 goes on.
        return line[after] not in "，、：,"
    if not space:
        return marks.strip(". ") != "" and _CHINESE.match(line, after) is not None
    if _LOWER.match(line, after):
        # "Hello!" he said.
        return False
    if marks != ".":
        return not (closers and _SPEECH.match(line, after))
    return bool(closers) or not _is_abbreviation(line, start, end)


def _is_abbreviation(line: str, start: int, end: re.Match) -> bool:
    """Whether the full stop `end` only shortens the word before it."""
    # Only its last words matter: a line of nothing but abbreviations may be long.
    before = line[max(start, end.start() - 100) : end.start()]
    words = before.rsplit(None, 1)
    if not words or _ITEM.fullmatch(before):
        return True
    # "he asked--Dr. John" and "me—Mr. Paul": only what follows the dash is the word.
    word = words[-1].rpartition("—")[2].rpartition("--")[2].lstrip("\"'“‘([{«")
    if _TITLES.fullmatch(word):
        return True
    if _COUNTED.fullmatch(word):
        return _NUMBER.match(line, end.end()) is not None
    if _FINAL.fullmatch(word) or _ACRONYM.fullmatch(word):
        return _STARTER.match(line, end.end()) is None
    return False
