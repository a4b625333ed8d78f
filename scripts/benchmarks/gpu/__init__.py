"""The stages of `make gpu`, run by `suite.sh`: the whole product on a GPU, then engine and training at 8B shape."""
