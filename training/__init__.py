"""The training room: everything that makes duetts-mini from generated speech. Never imported by the package."""
