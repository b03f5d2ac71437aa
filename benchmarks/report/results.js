// Draws every panel of the page where its element stands; a panel that cannot be drawn says so and leaves the others.
(() => {
  const panels = JSON.parse(document.getElementById("report-data").textContent);
  const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const draw = (element, panel) => {
    element.style.height = panel.layout.height + "px";
    Plotly.newPlot(element, panel.data, panel.layout, config).catch((reason) => {
      element.textContent = "This panel could not be drawn: " + reason.message;
    });
  };
  // What is far below is drawn when it comes near: the page opens at once.
  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      draw(target, panels[target.id]);
    }
  }, { rootMargin: "600px" });
  for (const [name, panel] of Object.entries(panels)) {
    const element = document.getElementById(name);
    element.style.height = panel.layout.height + "px";
    near.observe(element);
  }
})();
