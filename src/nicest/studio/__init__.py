"""The studio: trained models in the browser."""
