"""From what a model writes to what it says: reasoning, content and tool calls, one incremental parser a format."""
