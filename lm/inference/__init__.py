"""A trained model at work: found by `trained_model`, for `sampling` and for `compression`."""
