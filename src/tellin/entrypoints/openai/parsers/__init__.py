"""What a model's text means: thoughts, content, tool calls.

Parsers are state machines over characters. They decide from the characters seen so far and never
from where a text was cut, so for every way of cutting it the joined result is the same; the answer
that is not streamed is made by the same parser.
"""
