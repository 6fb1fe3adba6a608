"""The pages of the app, a file each; ``project/app.py`` shows them."""
