"""Ordered lists of (regex, value) that say something about every parameter.

The first regex that is found in a parameter's path decides; a parameter that none
matches is an error that names all of them. Rates, weight decay and places on the mesh
are such lists.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax

from bert_jax.errors import InputError
from bert_jax.models.model import path_name

EVERY = "a last rule ('.*', 1.0) matches all that are left"


def by_rule(params, rules: Sequence[tuple[str, Any]], *, advice: str = EVERY) -> dict:
    """The value of the first rule that matches each parameter; `advice` says what to do
    where none does."""
    unmatched = []

    def value(path, _):
        name = path_name(path)
        for pattern, result in rules:
            if re.search(pattern, name):
                return result
        unmatched.append(name)
        return None

    values = jax.tree_util.tree_map_with_path(value, params)
    if unmatched:
        names = ", ".join(unmatched)
        raise InputError(f"no rule matches the parameters {names}; {advice}")
    return values
