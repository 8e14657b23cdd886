"""Encoders for use elsewhere: folders of weights that other libraries load, and a plain module with its transform."""
