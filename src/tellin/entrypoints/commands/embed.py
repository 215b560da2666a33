"""``tellin embed``: vectors of texts, or how close texts are to another one, on standard output.

With ``--query`` a cross-encoder will do as well as a model that embeds.
"""

from __future__ import annotations

import argparse

from tellin.entrypoints.commands.common import add_model_arguments, open_llm, read_stdin
from tellin.exceptions import InvalidParameterError

DESCRIPTION = """\
Print the embedding of each text as a line of JSON; or with --query each text's similarity to
another text, the most similar first: of embeddings their cosine, or what a cross-encoder (reranker)
makes of the two texts."""

EXAMPLES = """\
examples:
  tellin embed "a cat" "a kitten"
  tellin embed --query "how to bake bread" - < notes.txt
  tellin embed -m ./model.gguf --truncate -1 - < long.txt | jq .embedding
"""

DEFAULT_EMBEDDER = "minilm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "text", nargs="*", help="texts; - (or none) reads one per line from standard input"
    )
    parser.add_argument("--query", metavar="TEXT", help="rank the texts by similarity to this one")
    parser.add_argument(
        "--truncate",
        type=int,
        metavar="N",
        help="cut texts to N tokens, -1 = to the model's context (truncate_prompt_tokens in Python "
        "and HTTP; default: a long one is an error)",
    )
    add_model_arguments(parser)
    parser.set_defaults(model=DEFAULT_EMBEDDER)


def run(args: argparse.Namespace) -> int:
    """Embed the texts."""
    texts = args.text or ["-"]
    if texts.count("-") > 1:
        raise InvalidParameterError("standard input (-) can be read once", parameter="text")
    texts = [line for text in texts for line in (_lines() if text == "-" else [text])]
    options = {}
    if args.truncate is not None:
        options["tokenization_kwargs"] = {"truncate_prompt_tokens": args.truncate}
    args.set.insert(0, "runner=pooling")
    with open_llm(args) as llm:
        if not texts:
            return 0
        if args.query is None:
            outputs = llm.embed(texts, **options)
            vectors = [output.outputs.embedding for output in outputs]
            _print_vectors(texts, vectors)
        else:
            scored = llm.score(args.query, texts, **options)
            scores = [output.outputs.score for output in scored]
            for i in sorted(range(len(texts)), key=lambda i: (-scores[i], i)):
                print(f"{scores[i]:.4f}\t{texts[i]}")
    return 0


def _lines() -> list[str]:
    return [line for line in read_stdin().splitlines() if line.strip()]


def _print_vectors(texts: list[str], vectors: list[list[float]]) -> None:
    import json

    for text, vector in zip(texts, vectors, strict=True):
        print(json.dumps({"text": text, "embedding": vector}, ensure_ascii=False))
