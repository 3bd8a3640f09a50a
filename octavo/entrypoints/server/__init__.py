"""What a server is and whom it serves: models, keys, requests that run. Knows no HTTP and no protocol."""
