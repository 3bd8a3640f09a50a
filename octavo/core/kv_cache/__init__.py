"""KV memory in blocks: who owns which, and which can be shared. Knows block numbers, never their contents."""
