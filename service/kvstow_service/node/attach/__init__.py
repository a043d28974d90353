"""The socket at which engines attach, and the thread that answers their calls."""
