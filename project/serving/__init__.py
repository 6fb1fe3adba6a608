"""The server of ``project/serve.py``: the thread of the engine, the HTTP interface, the page to chat."""
