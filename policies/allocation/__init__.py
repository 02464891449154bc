"""Which memory is promised?"""
