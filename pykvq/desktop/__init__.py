"""``pykvq-desktop``: chats and models in a window. Needs the extra "desktop": pip install 'pykvq[desktop]'."""
