"""Long checks of what goes wrong: ``python project/measure.py`` lists and runs them."""
