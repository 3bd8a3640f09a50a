"""``octavo bench``: measure an engine in this process, a server over HTTP, or a server's start."""
