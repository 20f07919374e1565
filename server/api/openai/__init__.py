"""The routes of OpenAI's API that generate: `/v1/completions` and `/v1/chat/completions`."""
