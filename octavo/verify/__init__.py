"""``octavo verify``: does a request get the same bits whatever else happens? Tried on the user's own model."""
