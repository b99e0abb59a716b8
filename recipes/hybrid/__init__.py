"""A small hybrid of gated delta nets and attention, and a draft for it."""
