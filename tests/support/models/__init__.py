"""Small models, and folders of weights as others publish them."""
