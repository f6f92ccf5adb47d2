"""Look at the objects and the code of the user: what an object can do, and which line called this package."""
