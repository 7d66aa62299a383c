"""``pykvq-serve``: an OpenAI-compatible server. Needs the extra "server": pip install 'pykvq[server]'."""
