"""Small models of Python source with their drafters. Their folders lie beside this file; truedraft finds them."""
