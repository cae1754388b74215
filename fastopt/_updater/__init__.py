"""The updater, which users import from :mod:`fastopt.optimizer`."""
