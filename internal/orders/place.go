package orders

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/mail"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/money"
)

// Limits of an order. Together they keep its event below event.MaxPayload.
const (
	maxLines       = 200
	maxText        = 200    // bytes of a customer's id, a stock keeping unit, a reference
	maxDescription = 1_000  // bytes of a line's description, a refund's reason
	maxMetadata    = 16_384 // bytes
)

// PlaceParams is an order as the customer gives it.
type PlaceParams struct {
	CustomerID    string
	CustomerEmail string
	Currency      string
	Lines         []LineParams
	Metadata      json.RawMessage // a JSON object; nil is {}
}

// LineParams is a line as the customer gives it. UnitAmount is in minor units; a
// TaxRate below 0 is one that was not given.
type LineParams struct {
	SKU         string
	Description string
	Quantity    int64
	UnitAmount  int64
	TaxRate     money.Rate
}

// Price checks an order and computes what it comes to. It needs no database, so
// that a request that can never succeed is refused before it opens one.
func Price(params PlaceParams) (Order, error) {
	if faults := params.faults(); len(faults) > 0 {
		return Order{}, ErrInvalid.WithFields(faults...)
	}
	currency, err := money.ParseCurrency(params.Currency)
	if err != nil {
		return Order{}, err
	}

	order := Order{
		Version:       1,
		Status:        StatusCreated,
		CustomerID:    params.CustomerID,
		CustomerEmail: params.CustomerEmail,
		Currency:      currency,
		Metadata:      params.Metadata,
	}
	if order.Metadata == nil {
		order.Metadata = json.RawMessage("{}")
	}
	for _, line := range params.Lines {
		net, err := money.Multiply(line.Quantity, line.UnitAmount)
		if err != nil {
			return Order{}, err
		}
		if order.NetAmount, err = money.Add(order.NetAmount, net); err != nil {
			return Order{}, err
		}
		order.Lines = append(order.Lines, Line{
			SKU: line.SKU, Description: line.Description,
			Quantity: line.Quantity, UnitAmount: line.UnitAmount, NetAmount: net, TaxRate: line.TaxRate,
		})
	}
	order.Taxes = taxes(order.Lines)
	for _, tax := range order.Taxes {
		order.TaxAmount += tax.TaxAmount
	}
	if order.TotalAmount, err = money.Add(order.NetAmount, order.TaxAmount); err != nil {
		return Order{}, err
	}
	if order.TotalAmount == 0 {
		return Order{}, ErrWithoutAmount
	}
	return order, nil
}

// taxes rounds once per rate, not once per line.
func taxes(lines []Line) []Tax {
	var byRate []Tax
	for _, line := range lines {
		at := slices.IndexFunc(byRate, func(tax Tax) bool { return tax.Rate == line.TaxRate })
		if at < 0 {
			at = len(byRate)
			byRate = append(byRate, Tax{Rate: line.TaxRate})
		}
		byRate[at].NetAmount += line.NetAmount
	}
	for i, tax := range byRate {
		byRate[i].TaxAmount = tax.Rate.Tax(tax.NetAmount)
	}
	slices.SortFunc(byRate, func(a, b Tax) int { return cmp.Compare(a.Rate, b.Rate) })
	return byRate
}

// PlaceTx stores an order that Price made and its OrderCreated event, both or
// neither.
func PlaceTx(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID, order Order, stamp Stamp) (Order, error) {
	order.TenantID = tenantID
	order.ID = uuid.Must(uuid.NewV7())
	order.CreatedAt, order.UpdatedAt = stamp.At, stamp.At

	queries := db.New()
	err := queries.OrderInsert(ctx, tx, db.OrderInsertParams{
		TenantID:      tenantID,
		ID:            order.ID,
		CustomerID:    order.CustomerID,
		CustomerEmail: order.CustomerEmail,
		Currency:      string(order.Currency),
		NetMinor:      order.NetAmount,
		TaxMinor:      order.TaxAmount,
		TotalMinor:    order.TotalAmount,
		Metadata:      order.Metadata,
		CreatedAt:     order.CreatedAt,
	})
	if err != nil {
		return Order{}, fmt.Errorf("insert order: %w", err)
	}

	lines := db.OrderLineInsertManyParams{TenantID: tenantID, OrderID: order.ID}
	for i, line := range order.Lines {
		lines.LineNos = append(lines.LineNos, int32(i+1))
		lines.Skus = append(lines.Skus, line.SKU)
		lines.Descriptions = append(lines.Descriptions, line.Description)
		lines.Quantities = append(lines.Quantities, line.Quantity)
		lines.UnitMinors = append(lines.UnitMinors, line.UnitAmount)
		lines.NetMinors = append(lines.NetMinors, line.NetAmount)
		lines.TaxRatesPpm = append(lines.TaxRatesPpm, int32(line.TaxRate))
	}
	if err := queries.OrderLineInsertMany(ctx, tx, lines); err != nil {
		return Order{}, fmt.Errorf("insert order lines: %w", err)
	}

	rates := db.OrderTaxInsertManyParams{TenantID: tenantID, OrderID: order.ID}
	for _, tax := range order.Taxes {
		rates.TaxRatesPpm = append(rates.TaxRatesPpm, int32(tax.Rate))
		rates.NetMinors = append(rates.NetMinors, tax.NetAmount)
		rates.TaxMinors = append(rates.TaxMinors, tax.TaxAmount)
	}
	if err := queries.OrderTaxInsertMany(ctx, tx, rates); err != nil {
		return Order{}, fmt.Errorf("insert order taxes: %w", err)
	}
	return order, appendEvent(ctx, tx, order, event.OrderCreated, nil, stamp)
}

// faults names what is malformed, all of it at once.
func (p PlaceParams) faults() []failure.Field {
	var faults []failure.Field
	check := func(field, fault string) {
		if fault != "" {
			faults = append(faults, failure.Field{Field: field, Detail: fault})
		}
	}
	check("customer_id", textFault(p.CustomerID, maxText))
	check("customer_email", emailFault(p.CustomerEmail))
	check("metadata", metadataFault(p.Metadata))
	if len(p.Lines) < 1 || len(p.Lines) > maxLines {
		check("lines", fmt.Sprintf("must have 1 to %d lines", maxLines))
		return faults
	}
	for i, line := range p.Lines {
		field := func(name string) string { return fmt.Sprintf("lines[%d].%s", i, name) }
		check(field("sku"), textFault(line.SKU, maxText))
		check(field("description"), textFault(line.Description, maxDescription))
		check(field("quantity"), rangeFault(line.Quantity, 1))
		check(field("unit_amount"), rangeFault(line.UnitAmount, 0))
		if line.TaxRate < 0 {
			check(field("tax_rate"), money.ErrTaxRate.Error())
		}
	}
	return faults
}

func rangeFault(number, least int64) string {
	if number < least || number > money.MaxMinor {
		return fmt.Sprintf("must be a whole number from %d to %d", least, money.MaxMinor)
	}
	return ""
}

// textFault refuses what cannot be stored or would break a line of a mail, a
// log or a terminal, the zero character among it.
func textFault(text string, longest int) string {
	switch {
	case strings.TrimSpace(text) == "" || len(text) > longest:
		return fmt.Sprintf("must have 1 to %d bytes", longest)
	case !utf8.ValidString(text):
		return "must be UTF-8"
	case strings.ContainsFunc(text, unicode.IsControl):
		return "must not have control characters"
	}
	return ""
}

func emailFault(text string) string {
	if fault := textFault(text, 254); fault != "" {
		return fault
	}
	address, err := mail.ParseAddress(text)
	if err != nil || address.Address != text {
		return "must be an e-mail address, such as a@example.com"
	}
	return ""
}

func metadataFault(metadata json.RawMessage) string {
	if metadata == nil {
		return ""
	}
	var object map[string]any
	switch {
	case len(metadata) > maxMetadata:
		return fmt.Sprintf("must have at most %d bytes", maxMetadata)
	case json.Unmarshal(metadata, &object) != nil || object == nil:
		return "must be a JSON object"
	}
	if escape := event.UnstorableEscape(metadata); escape != "" {
		return "must not have " + escape + " in a string"
	}
	return ""
}
