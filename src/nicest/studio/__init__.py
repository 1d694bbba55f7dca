"""The studio: trained models in the browser, served from this machine (`nicest studio RUN`)."""
