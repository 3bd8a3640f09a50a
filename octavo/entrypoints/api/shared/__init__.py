"""What several APIs have in common: OpenAI's shapes above all, and how they become the terms of ``chat``."""
