"""The socket at which engines attach, and the calls that they may make."""
