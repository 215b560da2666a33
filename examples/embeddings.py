"""Embeddings, and what texts have to do with each other.

python examples/embeddings.py [MODEL]

MODEL may be an encoder made for it (the default, all-MiniLM-L6-v2) or any model that generates:
its last hidden state is the embedding then, which is less apt.
"""

import sys

from tellin import LLM

model = sys.argv[1] if len(sys.argv) > 1 else "minilm"
notes = [
    "The cat sleeps on the window sill all day.",
    "Interest rates rose again in the second quarter.",
    "Knead the dough for ten minutes, then let it rest.",
]
question = "How do I bake bread?"

with LLM(model, runner="pooling", max_model_len=256, download=True) as llm:
    for output in llm.embed(notes):
        vector = output.outputs.embedding
        print(f"{len(vector)} numbers, the first of them {vector[0]:+.4f}")

    print(f"\n{question}")
    scores = [output.outputs.score for output in llm.score(question, notes)]
    for score, note in sorted(zip(scores, notes, strict=True), reverse=True):
        print(f"  {score:.3f}  {note}")
