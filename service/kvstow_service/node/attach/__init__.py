"""The socket at which engines attach, and what each of them may ask."""
