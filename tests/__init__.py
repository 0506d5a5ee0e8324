"""The tests of unicoll; one folder for each subject."""
