"""Typed faces of the compiled modules. They are built by `pip install .`; without them nothing here works."""
