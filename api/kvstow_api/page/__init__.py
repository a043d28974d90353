"""The status page: a self-contained overview of the server for any browser."""
