"""The hosting of the admin server: in an engine that embeds it, or in the node service."""
