"""Starts a thread when it is imported."""

import threading

thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
