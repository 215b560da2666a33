"""The page at ``/``: a chat playground and a live view of the engine, both without a build step.

`routes` answers, `view` turns what the engine tells into events. What the browser gets lies in
``static/`` as it is written. It loads nothing from elsewhere; settings are kept in the browser,
conversation and key in the tab.
"""
