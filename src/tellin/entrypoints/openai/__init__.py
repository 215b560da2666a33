"""The OpenAI-compatible HTTP server: one folder, one engine, no state but open requests.

Layers, each importing only those above it in this list: `errors`, `requests` (what comes in),
`replies` (what goes out), `parsers` (tool calls and thoughts in a text), `serving` (one request on
the engine), the services (`chat`, `completions`, ...), `routes`, `app`, `server`.
Needs the extra ``server``.
"""
