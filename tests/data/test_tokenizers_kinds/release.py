"""What the releases of ALBERT and XLNet do with sentencepiece, written down again."""

import unicodedata


def prepare(text, *, lowercase):
    text = " ".join(text.strip().split())
    text = text.replace("``", '"').replace("''", '"')
    text = unicodedata.normalize("NFKD", text)
    text = "".join([char for char in text if not unicodedata.combining(char)])
    return text.lower() if lowercase else text


def encode(processor, text, *, lowercase):
    """Ids, where a piece that ends in a digit and a comma is encoded once more."""
    result = []
    for piece in processor.encode(prepare(text, lowercase=lowercase), out_type=str):
        if len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit():
            again = processor.encode(piece[:-1].replace("▁", ""), out_type=str)
            if piece[0] != "▁" and again[0][0] == "▁":
                again = again[1:] if again[0] == "▁" else [again[0][1:], *again[1:]]
            result += [*again, ","]
        else:
            result.append(piece)
    return [processor.piece_to_id(piece) for piece in result]
