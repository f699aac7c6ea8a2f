def report(found, refused):
    return ""


def write(found, refused):
    pass
