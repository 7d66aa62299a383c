"""The app's icon: three tiers of a cache."""

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#12405c"/>'
    '<rect x="6" y="7" width="20" height="4" rx="2" fill="#ffb454"/>'
    '<rect x="6" y="14" width="14" height="4" rx="2" fill="#6ec1a8"/>'
    '<rect x="6" y="21" width="8" height="4" rx="2" fill="#8fb7e8"/></svg>'
)
