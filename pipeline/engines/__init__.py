"""What turns tokens into tokens. Importing the package imports no torch; `torch_engine` does."""
