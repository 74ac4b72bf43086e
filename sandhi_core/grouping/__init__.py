"""Which slots are proposed to share one tensor, by what recipe, and in which order each model tries them."""
